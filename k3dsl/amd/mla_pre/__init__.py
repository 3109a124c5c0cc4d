"""The monolithic mla_pre: one launch from the AttnRes seam to the input of the attention core."""
