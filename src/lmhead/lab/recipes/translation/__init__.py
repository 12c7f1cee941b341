"""The recipe `transformer-mt`: an encoder-decoder on sentence pairs, its tables tied or not."""
