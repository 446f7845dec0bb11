"""Parts that the scripts share: flags, choices of drafters, prompt files and output."""
