"""Rules of ops whose signature depends on their arguments, by family. The table of ops has them."""
