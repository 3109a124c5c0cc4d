"""Which kernels a gfx950 layer needs: one build of mla_pre a width and a number of residual blocks."""

from collections.abc import Iterable

from k3dsl.amd.mla_pre.key import MAX_BLOCKS, MlaPreBuild


def builds(
    widths: Iterable[int],
    *,
    ranks: int = 1,
    w_uk: str = "mxfp4",
    deltas: Iterable[bool] = (True,),
    eps: float = 1e-5,
) -> tuple[MlaPreBuild, ...]:
    """Every build of a layer, in the order of widths: an MLA layer of Kimi-K3 meets 1 to 8 residual blocks.

    widths: rows of a step. deltas: whether steps come with a delta to add to the prefix. Raises ConfigError for a
    width, a number of ranks or a format that mla_pre does not serve.
    """
    return tuple(
        MlaPreBuild(
            tokens=rows,
            ranks=ranks,
            nblocks=nblocks,
            delta=delta,
            w_uk=w_uk,
            eps=eps,
            out_eps=eps,
            q_eps=eps,
            kv_eps=eps,
        )
        for rows in dict.fromkeys(widths)
        for delta in dict.fromkeys(deltas)
        for nblocks in range(1, MAX_BLOCKS + 1)
    )
