"""What is refused before verifiers is imported, and environments by their path."""

from __future__ import annotations

import pytest

from tinsmith.errors import ConfigError
from tinsmith.integrations.verifiers import VerifiersEnvironment, package
from tinsmith.integrations.verifiers.legacy import VerifiersLegacyEnvironment

VERSIONS = {
    None: ("not installed", "not installed"),
    "0.4.0": (None, "0.4.0 is installed"),
    "0.3.1": ("0.3.1 is installed", None),
    "0.1.9.post3": ("0.1.9.post3 is installed", None),
    "0.1.8": ("0.1.8 is installed", "0.1.8 is installed"),
    "0.5.0": ("0.5.0 is installed", "0.5.0 is installed"),
}


@pytest.mark.parametrize("version", VERSIONS)
def test_missing_or_other_version_is_named_with_the_command(version, monkeypatch):
    from tinsmith.integrations.verifiers import legacy

    monkeypatch.setattr(package, "installed_version", lambda: version)
    monkeypatch.setattr(legacy, "installed_version", lambda: version)
    for require, message in zip((package.require_verifiers, legacy.require_legacy), VERSIONS[version], strict=True):
        if message is None:
            require()
        else:
            with pytest.raises(ConfigError, match=message) as error:
                require()
            assert "pip install" in str(error.value)


def test_absent_package_is_refused_when_tasks_are_loaded(monkeypatch):
    monkeypatch.setattr(package, "installed_version", lambda: None)
    with pytest.raises(ConfigError, match=r"pip install 'tinsmith\[verifiers\]'"):
        VerifiersEnvironment(id="any").tasks()


@pytest.mark.parametrize(
    ("files", "path", "name"),
    [
        (["my_rows.py"], "my_rows.py", "my_rows"),
        (["my_pack/__init__.py"], "my_pack", "my_pack"),
        (["my-env/pyproject.toml", "my-env/my_env/__init__.py", "my-env/tests/__init__.py"], "my-env", "my_env"),
        (["my-src/src/my_src/__init__.py"], "my-src", "my_src"),
        (["a-file/a_file.py"], "a-file", "a_file"),
        (["other/only_one/__init__.py"], "other", "only_one"),
    ],
)
def test_path_of_a_package_becomes_importable(files, path, name, tmp_path, monkeypatch):
    monkeypatch.setattr(package.sys, "path", list(package.sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert package.importable_name(str(tmp_path / path)) == name
    assert VerifiersEnvironment(id=str(tmp_path / path)).title == path.removesuffix(".py")


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ([], "missing", "no folder"),
        (["two/a/__init__.py", "two/b/__init__.py"], "two", "holds 2 packages"),
        (["json/__init__.py"], "json", "the name of another module, json"),
        (["My_Pack/__init__.py"], "My_Pack", "lower case"),
    ],
)
def test_path_that_cannot_be_imported_is_refused(files, path, message, tmp_path, monkeypatch):
    monkeypatch.setattr(package.sys, "path", list(package.sys.path))
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=message):
        package.importable_name(str(tmp_path / path))


def test_names_of_installed_packages_stay():
    assert package.importable_name("owner/gsm8k-v1") == "owner/gsm8k-v1"
    assert VerifiersEnvironment(id="owner/gsm8k-v1").title == "gsm8k-v1"
    assert VerifiersLegacyEnvironment(id="owner/gsm8k").title == "gsm8k"
