r"""Translates parallel text in files of your own.

    python -m experiments.train --config=configs/translation.py \
        --config.data.train=corpus/train \
        --config.data.splits.validation=corpus/dev \
        --config.data.splits.test=corpus/test \
        --config.data.source=en --config.data.target=de

This reads corpus/train.en and corpus/train.de, a sentence per line (or .en.gz,
.de.gz). --config.data.format=tsv reads a TSV file, and
--config.data.format=huggingface a Hugging Face dataset. The default model is a
Transformer; configs/translation.py:additive and the other scores train an RNN
encoder-decoder.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
  config = base.get_config(arg or "transformer")
  config.data = base.text()
  config.train.update(
    steps=20_000,
    batch_size=4096,
    batch_unit="tokens",
    label_smoothing=0.1,
    eval_every=1000,
    checkpoint_every=1000,
    keep_last=5,
    best_metric="bleu",
  )
  config.optimizer.update(schedule="inverse_sqrt", warmup_steps=1000)
  config.evaluation.update(
    checkpoint="last:5", beam_size=5, bleu_tokenizer="13a"
  )
  config.model.dropout_rate = 0.1
  if config.model.name == "transformer":
    config.model.update(
      model_size=256,
      feed_forward_size=1024,
      encoder_layers=4,
      decoder_layers=4,
      positions="sinusoidal",
    )
  else:
    config.model.update(
      embedding_size=256, hidden_size=256, attention_size=256, order="luong"
    )
  return config
