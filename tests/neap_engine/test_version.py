from neap_engine.version import installed_version


def test_version_of_the_distribution_that_has_the_command(tmp_path, monkeypatch):
    """A renamed distribution is found, and another project's command of the same name is not mistaken for ours."""
    for name, version, target in (
        ("neap-renamed", "7.8.9", "neap_engine.cli.main:app"),
        ("neap", "0.0.1", "neap.main:main"),
    ):
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "entry_points.txt").write_text(f"[console_scripts]\nneap = {target}\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert installed_version() == "7.8.9"
    monkeypatch.setattr("sys.path", [])
    assert installed_version() is None
