"""Every field of a config, with the value it has unless a config says so.

`configs/*.py` start from these and change what is theirs. The types and
ranges stand in `experiments/schema/`.
"""

from ml_collections import ConfigDict

SCORES = ("dot", "scaled_dot", "general", "additive", "concat", "cosine")
ARGUMENTS = ("none", *SCORES, "transformer")


def get_config(arg: str = "") -> ConfigDict:
  """Returns all defaults; `arg` is a score, "none" or "transformer"."""
  arg = arg or "additive"
  if arg not in ARGUMENTS:
    raise ValueError(
      f"unknown argument {arg!r} after the colon; known: {', '.join(ARGUMENTS)}"
    )
  config = ConfigDict()
  config.seed = 0
  config.data = data()
  config.model = transformer() if arg == "transformer" else seq2seq(arg)
  config.optimizer = optimizer()
  if arg == "transformer":
    config.optimizer.learning_rate = 2e-3
  config.train = train()
  config.evaluation = evaluation()
  config.mesh = mesh()
  return config


def data() -> ConfigDict:
  """What to learn from."""
  return ConfigDict(
    {
      "name": "reverse",  # copy | reverse | lookup
      "symbols": 50,
      "min_length": 1,
      "max_length": 25,
      "evaluation_seed": 0,
      "splits": {
        "validation": split(1, 25, 256),
        "test": split(1, 25, 2000),
        "test_up_to_30": split(1, 30, 2000),
        "test_26_to_30": split(26, 30, 1000),
      },
    }
  )


def split(min_length: int, max_length: int, num_examples: int) -> dict:
  """An evaluation set."""
  return {
    "min_length": min_length,
    "max_length": max_length,
    "num_examples": num_examples,
  }


def text() -> ConfigDict:
  """Parallel text to translate."""
  return ConfigDict(
    {
      "name": "text",
      "format": "lines",  # lines | tsv | huggingface
      "dir": "",
      "train": "train",
      "splits": {"validation": "val", "test": "test"},
      "source": "en",
      "target": "de",
      "source_tokenizer": tokenizer("unigram", 8000),
      "target_tokenizer": tokenizer("unigram", 8000),
      "joint_vocabulary": True,
      "max_length": 128,
      "num_shapes": 14,
    }
  )


def tokenizer(kind: str, vocabulary_size: int) -> dict:
  """How text becomes tokens: unigram | bpe | words | characters."""
  return {"kind": kind, "vocabulary_size": vocabulary_size, "sampling": 0.0}


def numbers() -> ConfigDict:
  """Integers to translate, spelt in one language and in another."""
  return ConfigDict(
    {
      "name": "numbers",
      "source": "en",  # any that num2words knows
      "target": "ko",
      "source_tokenizer": tokenizer("words", 1000),
      "target_tokenizer": tokenizer("characters", 1000),
      "joint_vocabulary": False,
      "max_length": 96,
      "num_shapes": 6,
      "train": digits(1, 12, 50_000),
      "splits": {
        "validation": digits(1, 12, 1000),
        "test": digits(1, 12, 2000),
        "test_13_to_16": digits(13, 16, 1000),
      },
      "seed": 0,
    }
  )


def digits(min_digits: int, max_digits: int, num_examples: int) -> dict:
  """A set of numbers."""
  return {
    "min_digits": min_digits,
    "max_digits": max_digits,
    "num_examples": num_examples,
  }


def seq2seq(attention: str) -> ConfigDict:
  """An RNN encoder-decoder."""
  return ConfigDict(
    {
      "name": "seq2seq",
      "embedding_size": 64,
      "hidden_size": 128,  # of the decoder
      "encoder_size": 0,  # of both directions together; 0: hidden_size
      "cell": "gru",  # gru | lstm
      "encoder_layers": 1,
      "decoder_layers": 1,
      "bidirectional": True,
      "attention": attention,
      "attention_size": 64,  # of additive and concat
      "order": "bahdanau",  # attend before the cell | luong: after it
      "query": "output",  # output of the top layer | state of all layers
      "readout": "tanh",  # tanh(W [context; output]) | linear
      "input_feeding": False,
      "dropout_rate": 0.0,
    }
  )


def transformer() -> ConfigDict:
  """A Transformer encoder-decoder."""
  return ConfigDict(
    {
      "name": "transformer",
      "model_size": 128,
      "feed_forward_size": 256,
      "num_heads": 4,
      "encoder_layers": 2,
      "decoder_layers": 2,
      "score": "scaled_dot",
      "norm": "pre",  # pre | post
      "positions": "rotary",  # sinusoidal | learned | rotary | alibi | none
      "tied_embeddings": True,
      "dropout_rate": 0.0,
      "attention_dropout_rate": 0.0,
    }
  )


def optimizer() -> ConfigDict:
  """How to learn."""
  config = ConfigDict(
    {
      "name": "adam",  # sgd | adam | adamw | adafactor
      "learning_rate": 3e-3,
      "schedule": "cosine",  # constant | cosine | linear | inverse_sqrt
      "warmup_steps": 100,
      "b1": 0.9,
      "b2": 0.98,
      "eps": 1e-9,
      "weight_decay": 0.0,
      "clip_norm": 1.0,
    }
  )
  return config


def train() -> ConfigDict:
  """For how long, and what is kept."""
  return ConfigDict(
    {
      "steps": 2500,
      "batch_size": 32,
      "batch_unit": "examples",  # examples | tokens
      "row_multiple": 8,  # of rows, where batch_unit is tokens
      "accumulation": 1,
      "dtype": "float32",  # float32 | bfloat16
      "label_smoothing": 0.0,
      "non_finite": "stop",  # stop | skip the update
      "stall_seconds": 1800,  # of several processes, before all stop
      "log_every": 50,
      "eval_every": 500,
      "checkpoint_every": 500,
      "keep_last": 2,
      "keep_best": 1,
      "best_metric": "sequence_accuracy",
      "patience": 0,  # looks at the validation set without a better one
      "ema_decay": 0.0,
    }
  )


def evaluation() -> ConfigDict:
  """How a run is judged once it is trained."""
  return ConfigDict(
    {
      "checkpoint": "last",  # last | best | last:N | best:N | a step
      "beam_size": 1,
      "length_penalty": 1.0,
      "bleu_tokenizer": "none",  # 13a for text that is not tokenised
      "lowercase": False,
    }
  )


def mesh() -> ConfigDict:
  """Devices that share rows, parameters, tokens, and heads."""
  return ConfigDict({"data": -1, "fsdp": 1, "sequence": 1, "tensor": 1})
