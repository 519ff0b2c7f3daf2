"""The RNN encoder-decoder, with and without attention."""
