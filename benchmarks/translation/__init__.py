"""Translation against JoeyNMT, in one run: training and decoding speed.

    python -m benchmarks.translation --data=DIR --joeynmt=PYTHON

DIR holds Multi30k's raw files, as `experiments.download` leaves them. PYTHON is
the interpreter of an environment with JoeyNMT, which needs another
SentencePiece than we do:

    pip install torch joeynmt importlib_metadata 'setuptools<80' \
      sentencepiece==0.2.0 tensorboard

Without it our own figures alone are measured.
"""
