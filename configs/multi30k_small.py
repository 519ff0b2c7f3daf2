r"""Translates image captions with a small RNN, to compare scores over seeds.

The corpus is that of configs/multi30k.py, with 4,000 joint BPE subwords, an RNN
with 128 features and 1,500 steps of 2,048 tokens. The default score is
additive; configs/multi30k_small.py:dot and the like use other scores.
(:transformer uses the RNN's steps and learning rate; it has not been tested.)

Source: the scores are those of Luong et al., 2015, section 3.1
(https://arxiv.org/abs/1508.04025), and Bahdanau et al., 2014, A.1.2
(https://arxiv.org/abs/1409.0473); the corpus is Elliott et al., 2016
(https://arxiv.org/abs/1605.00459). The sizes are our own.

    python -m experiments.download multi30k DIR
    python -m experiments.compare --config=configs/multi30k_small.py \
        --config.data.dir=DIR --seeds=5 --workdir=runs/scores-multi30k \
        --scores=none,dot,scaled_dot,general,additive,concat,cosine

Time: about 3 minutes per run on 2 CPU cores.
Result: BLEU on test_2016_flickr with beam size 5, mean of five seeds: none
16.94, scaled dot 27.47, the other scores 31.6 to 32.3; see docs/results.md.
"""

from ml_collections import ConfigDict

from configs import multi30k


def get_config(arg: str = "") -> ConfigDict:
  config = multi30k.get_config(arg or "additive")
  for tokenizer in (config.data.source_tokenizer, config.data.target_tokenizer):
    tokenizer.vocabulary_size = 4000
  config.optimizer.update(
    schedule="cosine", learning_rate=4e-3, warmup_steps=150
  )
  config.train.update(batch_size=2048, steps=1500, eval_every=250, patience=0)
  config.model.dropout_rate = 0.2
  if config.model.name == "seq2seq":
    config.model.update(embedding_size=128, hidden_size=128, attention_size=128)
  return config
