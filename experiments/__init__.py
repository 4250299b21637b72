"""The paper's figures and tables, and studies of our own: a script each, with a page beside it."""
