"""Many rows through an engine: a data set goes in, and the same set with answers comes out."""
