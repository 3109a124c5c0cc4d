"""The AMD half: kernels for gfx950 in FlyDSL. Nothing here imports torch or FlyDSL before it is used."""
