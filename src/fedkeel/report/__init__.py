"""Tables, charts and pages made from records only, without torch and without an engine."""
