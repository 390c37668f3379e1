"""Versions of this code: commits, their differences, and git worktrees."""

import os
import subprocess
from pathlib import Path

from gpt2.errors import UserError
from gpt2.utils.code import SOURCE
from gpt2.utils.files import locked

# The environment variable with the path of the user's checkout. It is set in a process that runs a
# ledger's copy of the code.
CHECKOUT = "GPT2_CHECKOUT"
WORKING_TREE = "."  # the value of `code=` for the current files


def find_commit(name: str) -> str:
    """Return the commit of a branch or tag, or "" if `name` is `.`, the working tree."""
    if name == WORKING_TREE:
        return ""
    # The name may begin with a hyphen.
    verify = ("rev-parse", "--verify", "--quiet", "--end-of-options")
    commit = _git(*verify, f"{name}^{{commit}}")
    if not commit:
        raise UserError(
            f"code={name} is not a branch, tag or commit of the git repository in {_checkout()}",
            "Run `git branch` there to see the branches",
        )
    return commit


def diff(old: str, new: str) -> str:
    """Return git's diff of the Python files in two commits."""
    return _git("diff", old, new, "--", "*.py")


def changed_files(old: str, new: str) -> dict[str, bool]:
    """Return the paths that differ between two commits.

    The value of a path is whether the path is a text file in `new`. A path that was removed has the
    value True, unless git treats the old file as binary.
    """
    form = ("-z", "--no-renames", old, new)
    counts = _git("diff", "--numstat", *form).split("\0")
    entries = _git("diff", "--raw", *form).split("\0")
    changed = dict[str, bool]()
    for entry, path in zip(entries[::2], entries[1::2], strict=False):
        _, mode, *_ = entry.split(" ")
        is_file = mode in ("100644", "100755", "000000")  # not a link or submodule
        changed[path] = is_file and f"-\t-\t{path}" not in counts
    return changed


def contains(commit: str, other: str) -> bool:
    """Return whether `commit` has all changes of `other`: merging `other` would change nothing.

    The history of commits does not show this, because no branch contains the commits that
    `snapshot` makes, and because a later commit may undo a change.
    """
    # Versions of git before 2.38 cannot merge trees.
    if commit == other:
        return True
    merged = _git("merge-tree", "--write-tree", commit, other)
    return merged == _git("rev-parse", f"{commit}^{{tree}}")


def snapshot() -> str:
    """Return a commit of the current working tree, or "" if there is no git checkout.

    Raise a UserError if git does not track a Python file in gpt2/ or configs/, because the commit
    would not contain this file.
    """
    if not _git("ls-files", "train.py"):
        return ""
    # `git stash create` leaves out files that git does not track.
    others = _git("ls-files", "--others", "--exclude-standard", "--", "gpt2", "configs")
    for file in others.splitlines():
        if file.endswith(".py"):
            raise UserError(
                f"git does not track {file}, so a commit of the working tree would not contain it",
                f"Run `git add {file}`, or remove the file",
            )
    return _git("stash", "create") or _git("rev-parse", "HEAD")


def source_folder(root: Path, commit: str) -> Path:
    """Return the folder of a commit's code. `root` is the folder of the sweep or ledger.

    If `commit` is "", return the folder of the working tree.
    """
    return root / "code" / commit if commit else SOURCE


def check_out(root: Path, commit: str) -> Path:
    """Return the folder of a commit's code. If it is missing, create it as a git worktree.

    `root` is the folder of the sweep or ledger. If `commit` is "", return the folder of the working
    tree.
    """
    source = source_folder(root, commit)
    if not commit:
        return source
    # The lock is needed because several processes may check out the same commit at the same time.
    with locked(source.parent.with_suffix(".lock")):
        if not source.exists():
            add = ("worktree", "add", "-f", "--detach", str(source.absolute()), commit)
            _git(*add)
            if not source.exists():
                raise UserError(
                    f"git cannot check out the commit {commit}",
                    f"To see why, run `git -C {_checkout()} {' '.join(add)}`",
                )
        # Remove files that git ignores, such as compiled Python files that a run has written. The
        # check below does not see such files.
        _git("clean", "-ffdXq", folder=source)
        if _git("status", "--porcelain", folder=source):
            raise UserError(
                f"{source} is not a clean git worktree",
                f"Remove {source}, and repeat the command",
            )
    return source


def _checkout() -> str:
    """Return the folder of the user's checkout."""
    return os.path.abspath(os.environ.get(CHECKOUT, SOURCE))


def _git(*arguments: str, folder: Path | None = None) -> str:
    """Run git in `folder`, or in the user's checkout. Return its output, or "" if it fails."""
    checkout = str(folder or _checkout())
    command = ["git", "--no-optional-locks", "-C", checkout, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:  # git is not installed
        return ""
    # git refuses to read a checkout that belongs to another user, as may happen in a container.
    if "dubious ownership" in done.stderr:
        raise UserError(
            f"git refuses to read {checkout}, which belongs to another user",
            f"Run `git config --global --add safe.directory {os.path.abspath(checkout)}`",
        )
    return done.stdout.strip() if done.returncode == 0 else ""
