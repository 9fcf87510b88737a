"""Published models, by the entry points ``daf.models``: ``daf train unet …`` finds them here."""
