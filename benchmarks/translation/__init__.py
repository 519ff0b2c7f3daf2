"""Compares training and decoding speed with JoeyNMT, in one run.

    python -m benchmarks.translation --data=DIR --joeynmt=PYTHON

DIR holds Multi30k's raw files, as `experiments.download` stores them. PYTHON is
the interpreter of a separate environment with JoeyNMT, which needs an older
SentencePiece:

    pip install torch joeynmt importlib_metadata 'setuptools<80' \
      sentencepiece==0.2.0 tensorboard

Without `--joeynmt` only our speed is measured.
"""
