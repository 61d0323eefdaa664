"""Tables, figures and the page: made from records alone, without torch and without an engine."""
