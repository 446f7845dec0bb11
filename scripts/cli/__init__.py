"""What the scripts share: flags, choices of drafters, prompt files, what is shown."""
