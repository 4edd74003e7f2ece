"""Other people's words, translated at the border: what comes in here goes on as our own nouns."""
