"""The conformance suite: cases, poison and oracles that every implementation of an operator is run against."""
