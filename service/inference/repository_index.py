"""The index of a repository: every version that is served or lies there, and why it is not."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from service.inference.model import Model


@dataclass(frozen=True)
class Listed:
    """A version of an artifact as the index lists it."""

    name: str
    version: int
    problem: str | None
    """Why it takes no calls; None = it does."""


def index_of(
    present: Mapping[str, Sequence[int]],
    served: Mapping[str, Sequence[Model]],
    withdrawn: Collection[str],
    problems: Mapping[tuple[str, int], str],
    versions_kept: int,
) -> list[Listed]:
    """
    Return the index by name and version, ascending.

    `present` are the versions in the repository; `served` those of each name that are served,
    the highest first, `versions_kept` of them at most; `withdrawn` the names that were
    unloaded; `problems` why versions cannot be served.
    """
    listed: dict[tuple[str, int], str | None] = {}
    for name, versions in present.items():
        models = served.get(name, ())
        is_full = len(models) == versions_kept
        for version in versions:
            if name in withdrawn:
                why = "unloaded"
            elif is_full and version < models[-1].version:
                why = "not served: higher versions are"
            else:
                why = "not loaded"
            listed[name, version] = problems.get((name, version), why)
    for models in served.values():
        listed |= {(model.name, model.version): model.problem for model in models}
    return [Listed(*key, problem) for key, problem in sorted(listed.items())]
