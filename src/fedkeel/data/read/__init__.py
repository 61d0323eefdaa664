"""Reading: known sets in their original formats, files of one's own, downloads, joining."""
