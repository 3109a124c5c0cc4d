"""Sparse MLA over fp8_ds_mla records on gfx950: facts, device code, and the functions that engines call."""
