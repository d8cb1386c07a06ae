"""What a user chooses of the statistics that `carried` carries from past windows to the next."""

import dataclasses
from typing import Any

from streamgrad.checks import check_choice, check_decay, check_size
from streamgrad.theory.optimal_q import check_damping


@dataclasses.dataclass(frozen=True)
class Carry:
    """A choice; see `carried`, which checks it."""

    episode: int | None = None
    window: int = 64
    decay: float = 0.99
    damping: float = 0.005
    refresh: int = 10
    streams: int | None = 1
    least: int | None = None
    q0: str = "diagonal"
    alpha: str = "gir"
    statistics: str = "reverse"

    @property
    def passes(self) -> int:
        """How many reverse passes must have been made before their averages are used."""
        if self.least is not None:
            return self.least
        return 16 if self.episode is None else max(16, self.episode)


def carried(
    episode: int | None = None,
    window: int = 64,
    decay: float = 0.99,
    damping: float = 0.005,
    refresh: int = 10,
    streams: int | None = 1,
    least: int | None = None,
    q0: str | None = None,
    alpha: str | None = None,
    statistics: str = "reverse",
) -> Carry:
    """Q_0 and α for `uoro(carry=...)` and `preuoro(carry=...)`, from what past windows have shown.

    The paper's optimal Q_0 and α need the future of the very episode they are used in. But whatever Q_0 and α are, the
    gradient stays unbiased as long as they do not depend on the noise they shape. So B and C are estimated from *past*
    windows, by one reverse pass over a window of one stream (`streamgrad.adapt.window`), averaged exponentially,
    and used for the next. Until enough passes have been made, and whenever an average makes no sense, Q_0 is the
    identity and α is that of GIR. All of it is state.

    On endless streams only Q_0 is carried over, and GIR chooses γ and β. An α that does not look at the two factors
    cannot keep them balanced for ever: where γ ρ(dh/dh) > 1 the tangent grows without bound while the cotangent
    shrinks. The product stays unbiased, but its variance diverges.

    Args:
      episode: T, where every episode has at most that many steps: α is then one number for each position in it, and the
        window is the chunk, which should be a whole episode. None for endless streams: the window is `window` steps.
      window: for streams, how many steps a reverse pass goes back. Chunks that are shorter are gathered until they fill
        it; influence from before the window is not seen.
      decay: of the averages, for each window. Fewer streams need a longer memory.
      damping: how much of the mean eigenvalue of B is added to all of them.
      refresh: after how many windows Q_0 and α are solved anew.
      streams: how many streams of a batch are watched, in turns; None for all.
      least: how many reverse passes before the averages are used; by default 16, or as many as an episode has steps.
      q0: "full" (a block for each group), "diagonal" (cheap where there are many preactivations), or "none"; by default
        full for episodes and diagonal for streams, where a full one gains no more and can lose.
      alpha: "optimal" (for episodes, their default), or one that looks at the two factors at every step: "gir" (the
        default for streams), or "greedy" (Appendix D).
      statistics: where B comes from: "reverse", or "appendix_f", the paper's own online estimator, which is of rank two
        and too noisy to help; it is here to compare with, needs `episode`, and with `alpha="gir"` no reverse pass.

    Returns:
      The choice.

    Example:
      >>> import streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(28, 50), sg.heads.softmax(10))
      >>> est = sg.batched(sg.uoro(model, carry=sg.estimators.carried(episode=28)), 50)
    """
    for name, value in (("episode", episode), ("streams", streams), ("least", least)):
        if value is not None:
            check_size(**{name: value})
    check_size(least=2, window=window)
    check_size(refresh=refresh)
    check_decay(decay)
    check_damping(damping)
    q0 = q0 or ("diagonal" if episode is None else "full")
    alpha = alpha or ("gir" if episode is None else "optimal")
    check_choice("q0", q0, ("full", "diagonal", "none"))
    check_choice("alpha", alpha, ("optimal", "gir", "greedy"))
    check_choice("statistics", statistics, ("reverse", "appendix_f"))
    if statistics == "appendix_f" and (episode is None or q0 == "none"):
        raise ValueError("statistics='appendix_f' estimates B of whole episodes: give episode, and a q0 to use it for.")
    if alpha == "optimal" and episode is None:
        raise ValueError("alpha='optimal' has a value for each position in an episode: give episode, or alpha='gir'.")
    if q0 == "none" and alpha != "optimal":
        raise ValueError(f"with q0='none' and alpha={alpha!r} there is nothing to carry over: use rescale={alpha!r}.")
    return Carry(episode, window, decay, damping, refresh, streams, least, q0, alpha, statistics)


def find_carry(carry: Any, cut: str, rescale: Any, q0: Any) -> Carry | None:
    """What `uoro(carry=...)` means: None, a choice of one's own, or that of `carried()` for True."""
    if carry is None or carry is False:
        return None
    if carry is not True and not isinstance(carry, Carry):
        raise ValueError(f"carry must be True, False, or what streamgrad.estimators.carried returns, not {carry!r}.")
    if cut != "preactivation":
        raise ValueError(f"carry needs the cut 'preactivation', not {cut!r}.")
    if q0 is not None or not (isinstance(rescale, str) and rescale == "gir"):
        raise ValueError("carry chooses Q_0 and alpha by itself: leave q0 and rescale as they are.")
    return carried() if carry is True else carry
