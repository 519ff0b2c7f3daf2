"""Where training and evaluation examples come from."""
