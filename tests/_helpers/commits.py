"""Repositories for tests of what a commit holds."""

import shutil
import subprocess

from _helpers.checkouts import git


def commit_tree(root, folder):
    """Makes a repository in `folder` whose one commit holds the checkout `root` as it is; False without git."""
    if shutil.which("git") is None:
        return False
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode != 0:
        return False
    for name in listed.stdout.split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--force", ".")
    git(folder, "commit", "--quiet", "--message=one")
    return True
