"""tapcheck proves that the activations you capture are the activations the model computed."""
