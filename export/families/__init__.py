"""How the families of Hugging Face checkpoints lay out their attention: one file a family."""
