"""The version of the installed package."""

from importlib.metadata import entry_points


def installed_version() -> str | None:
    """Return the version of the distribution that installed the command `neap`.
    None if neap runs from a checkout that is not installed."""
    # By the command and not by the distribution's name, because this code does not know under which name it was
    # packaged.
    for command in entry_points(group="console_scripts", name="neap"):
        if command.module == "neap_engine.cli.main" and command.dist is not None:
            return command.dist.version
    return None
