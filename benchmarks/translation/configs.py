"""The same models as configs of ours and of JoeyNMT.

Both have a joint unigram vocabulary of 8,000 and batches of 4,096 tokens: the
longer side times the number of sentences. The Transformer has 4 + 4 layers of
width 128, the RNN a bidirectional GRU of 256 + 256 and a GRU of 256 with
additive attention and input feeding.
"""

from ml_collections import ConfigDict

from configs import base, multi30k

MODELS = ("transformer", "rnn")
VOCABULARY_SIZE = 8000


def ours(model: str, directory: str) -> ConfigDict:
  """Our config of a model, for Multi30k's raw files in a directory."""
  config = multi30k.get_config("transformer" if model != "rnn" else "additive")
  tokenizer = base.tokenizer("unigram", VOCABULARY_SIZE)
  config.data.update(
    dir=directory,
    train="train",
    splits={"validation": "val", "test": "test_2016_flickr"},
    source_tokenizer=tokenizer,
    target_tokenizer=tokenizer,
  )
  config.optimizer.update(name="adamw", clip_norm=1.0)
  config.train.label_smoothing = 0.1 if model == "transformer" else 0.0
  if model == "transformer":
    config.model.update(dropout_rate=0.3, attention_dropout_rate=0.3)
  else:
    config.model.update(
      encoder_size=512, input_feeding=True, dropout_rate=0.2, order="luong"
    )
  return config


def joeynmt(
  model: str, folder: str, updates: int, subwords: str | None = None
) -> dict:
  """JoeyNMT's config of a model, for its YAML.

  `folder` holds its data and its run, and its subwords unless `subwords` does.
  """
  transformer = model == "transformer"
  return {
    "name": model,
    "joeynmt_version": "2.3.0",
    "model_dir": f"{folder}/{model}",
    "use_cuda": False,
    "fp16": False,
    "random_seed": 42,
    "data": _data(folder, subwords or folder),
    "testing": {
      "n_best": 1,
      "beam_size": 5,
      "beam_alpha": 1.0,
      "batch_size": 100,
      "batch_type": "sentence",
      "eval_metrics": ["bleu"],
      "sacrebleu_cfg": {"tokenize": "13a"},
    },
    "training": {
      **_TRAINING,
      "updates": updates,
      "learning_rate": 0.002 if transformer else 0.001,
      "label_smoothing": 0.1 if transformer else 0.0,
    },
    "model": _transformer() if transformer else _rnn(),
  }


_TRAINING = {
  "optimizer": "adamw",
  "adam_betas": [0.9, 0.98],
  "learning_rate_min": 0.0,
  "learning_rate_warmup": 1000,
  "scheduling": "warmupinversesquareroot",
  "clip_grad_norm": 1.0,
  "weight_decay": 0.0,
  "loss": "crossentropy",
  "batch_size": 4096,
  "batch_type": "token",
  "normalization": "tokens",
  "epochs": 1000,
  "validation_freq": 10**8,
  "logging_freq": 10,
  "early_stopping_metric": "bleu",
  "overwrite": True,
  "shuffle": True,
  "keep_best_ckpts": 3,
}


def _data(folder: str, subwords: str) -> dict:
  side = {
    "max_length": 100,
    "lowercase": False,
    "level": "bpe",
    "voc_file": f"{subwords}/vocab.txt",
    "tokenizer_type": "sentencepiece",
    "tokenizer_cfg": {"model_file": f"{subwords}/joint.model"},
  }
  return {
    "train": f"{folder}/train",
    "dev": f"{folder}/val",
    "test": f"{folder}/test_2016_flickr",
    "dataset_type": "plain",
    "src": {"lang": "en", **side},
    "trg": {"lang": "de", **side},
    "special_symbols": {
      "unk_token": "<unk>",
      "pad_token": "<pad>",
      "bos_token": "<s>",
      "eos_token": "</s>",
      "unk_id": 0,
      "pad_id": 1,
      "bos_id": 2,
      "eos_id": 3,
    },
  }


def _transformer() -> dict:
  layers = {
    "type": "transformer",
    "num_layers": 4,
    "num_heads": 4,
    "embeddings": {"embedding_dim": 128, "scale": True},
    "hidden_size": 128,
    "ff_size": 256,
    "dropout": 0.3,
    "layer_norm": "pre",
    "activation": "relu",
  }
  return {
    "initializer": "xavier_uniform",
    "bias_initializer": "zeros",
    "embed_initializer": "xavier_uniform",
    "tied_embeddings": True,
    "tied_softmax": True,
    "encoder": layers,
    "decoder": layers,
  }


def _rnn() -> dict:
  layer = {
    "type": "recurrent",
    "rnn_type": "gru",
    "embeddings": {"embedding_dim": 256, "scale": False},
    "hidden_size": 256,
    "num_layers": 1,
    "dropout": 0.2,
    "activation": "tanh",
  }
  decoder = {
    "attention": "bahdanau",
    "hidden_dropout": 0.2,
    "init_hidden": "bridge",
    "input_feeding": True,
  }
  return {
    "initializer": "xavier_uniform",
    "bias_initializer": "zeros",
    "embed_initializer": "normal",
    "embed_init_weight": 0.1,
    "encoder": {**layer, "bidirectional": True},
    "decoder": {**layer, **decoder},
  }
