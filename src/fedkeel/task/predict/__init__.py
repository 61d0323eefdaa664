"""Using a trained model: the inputs made ready as in training, the answers, other formats."""
