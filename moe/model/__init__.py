"""The Transformer, decoder or encoder-decoder, dense or with experts. It runs without a process group."""
