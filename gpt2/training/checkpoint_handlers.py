"""What writes and reads the parts of a checkpoint, by Orbax's means."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from gpt2.training.checkpoint_files import ITEMS, of_items
from gpt2.utils import files
from gpt2.utils.digests import digest_folder, seal


def make_handlers(parameters_in_flight: int | None) -> Any:
    """Returns what saves and restores each part, in the order in which they are finalized.

    Args:
        parameters_in_flight: as for `Checkpointer`.
    """
    limit = None if parameters_in_flight is None else parameters_in_flight / 10**9
    limited = ocp.StandardCheckpointHandler(save_concurrent_gb=limit, restore_concurrent_gb=limit)
    arrays = (ocp.args.StandardSave, ocp.args.StandardRestore)
    json_args = (ocp.args.JsonSave, ocp.args.JsonRestore)
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    for name, handler, kinds in (
        ("params", limited, arrays),
        ("rest", ocp.StandardCheckpointHandler(), arrays),
        ("layout", ocp.JsonCheckpointHandler(), json_args),
        ("metrics", ocp.JsonCheckpointHandler("metrics"), json_args),
        ("digests", _DigestHandler(), json_args),
    ):
        for kind in kinds:
            registry.add(name, kind, handler)
    return registry


def without_closed_loops(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Wraps `sys.unraisablehook`, by which TensorStore prints that nobody waits for its work.

    It does so for each write or read that ends after another one of the same call has failed.
    """

    def filtered(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(unraisable)

    return filtered


class _DigestHandler(ocp.JsonCheckpointHandler):
    """Writes the digests of the other items, once they are complete and before the commit."""

    def __init__(self) -> None:
        super().__init__("digests")

    def finalize(self, directory: Any) -> None:
        """Called by the first process, after all items that were registered before this one."""
        folder = Path(directory)
        found = digest_folder(folder.parent)
        tree = seal({"files": of_items(found, ITEMS)})
        (folder / "digests").write_text(json.dumps(tree))
        files.sync_tree(folder.parent)  # before a rename makes them visible
