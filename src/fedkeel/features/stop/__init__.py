"""When a run ends before its last round, its best model, and which models it leaves."""
