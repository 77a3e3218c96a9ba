"""The tests of phalanx, laid out as the package is."""
