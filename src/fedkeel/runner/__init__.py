"""One run: prepared, started or resumed, made round by round, recorded."""
