"""Codecs: a dense tensor to planes in a store (``pool``) and back, one class for each kind."""
