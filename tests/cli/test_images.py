"""`cloche image`, `--image` and `Image`: with a keeper and without, in words and in JSON."""

from __future__ import annotations

import json
import shutil

import pytest

from cloche import Image, Sandbox, errors
from tests.images import layouts

pytestmark = pytest.mark.skipif(shutil.which("skopeo") is None, reason="there is no skopeo here")


@pytest.fixture
def layout(tmp_path):
    digest = layouts.write_layout(
        tmp_path / "img",
        layouts.small_root(),
        layouts.layer(layouts.entry("hello", b"hi\n")),
        config={"Cmd": ["sh"]},
    )
    return tmp_path / "img", digest


def test_mistakes_are_sentences(bare, tmp_path):
    for words, said in (
        (["image"], b"required: ACT"),
        (["image", "frob"], b"invalid choice"),
        (["image", "pull"], b"takes one image"),
        (["image", "list", "x"], b"takes no image"),
        (["image", "pull", "python"], b"image_reference_invalid"),
        (["image", "inspect", "oci:/none"], b"image_not_found"),
        (["image", "remove", "sha256:" + "0" * 64], b"image_not_found"),
        (["image", "build", str(tmp_path / "none")], b"file_not_found"),
        (["image", "list", "--directory", "x"], b"--directory is for"),
        (["run", "--image", "python", "--", "true"], b"image_reference_invalid"),
        (["run", "--image", "", "--", "true"], b"image_reference_invalid"),
    ):
        ran = bare(*words)
        assert ran.returncode == 125, words
        # An error's code is in what JSON says.
        text = ran.stderr + (
            bare(*words[:1], "--json", *words[1:]).stdout
            if said.startswith(b"image_") or b"_not_" in said
            else b""
        )
        assert said in text, (words, text)
        assert b"Traceback" not in ran.stderr


@pytest.mark.parametrize("with_keeper", [False, True])
def test_pull_run_list_inspect_remove(bare, layout, with_keeper):
    if with_keeper:
        bare.start_keeper()
    place, digest = layout
    pulled = bare("image", "pull", "oci:img", cwd=place.parent)
    assert pulled.stdout.decode().strip() == digest, pulled.stderr
    assert b"unpacking layer 1 of 2" in pulled.stderr
    assert bare("run", "--image", "oci:./img", "--", "cat", "/hello", cwd=place.parent).stdout == b"hi\n"
    assert bare("run", "--image", digest, "--", "cat", "/hello").stdout == b"hi\n"
    found = json.loads(bare("image", "list", "--json").stdout)
    assert [(image["digest"], image["kind"]) for image in found] == [(digest, "layout")]
    assert digest[:19].encode() in bare("image", "list").stdout
    assert json.loads(bare("image", "inspect", digest, "--json").stdout)["cmd"] == ["sh"]
    assert b"cmd" in bare("image", "inspect", digest).stdout
    assert json.loads(bare("image", "gc", "--json").stdout) == []
    assert bare("image", "remove", digest).stdout.decode().strip() == digest
    assert json.loads(bare("image", "list", "--json").stdout) == []


def test_an_image_of_a_sandbox_that_stays_is_not_removed(kept, layout):
    place, digest = layout
    box = kept("create", "--image", f"oci:{place}").stdout.decode().strip()
    assert kept("exec", box, "--", "cat", "/hello").stdout == b"hi\n"
    refused = kept("image", "remove", digest, "--json")
    assert json.loads(refused.stdout)["error"]["code"] == "image_in_use"
    assert kept("delete", box).returncode == 0
    assert kept("image", "remove", digest).returncode == 0


def test_build(bare, layout, tmp_path):
    bare.settings("[build]\nallow = []\n")
    place, _ = layout
    (tmp_path / "file").write_text("copied\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"from: oci:{place}\nsteps:\n  - run: echo building && false\n")
    failed = bare("image", "build", str(recipe))
    assert failed.returncode == 125
    assert b"building" in failed.stderr
    assert b"step 1" in failed.stderr
    recipe.write_text(
        f"from: oci:{place}\nsteps:\n  - copy: {{from: file, to: /etc/file}}\n  - run: echo building\n"
    )
    made = bare("image", "build", "recipe.yaml", "--json", cwd=tmp_path)
    image = json.loads(made.stdout)
    assert image["kind"] == "recipe"
    assert b"step 2 of 2: run: echo building" in made.stderr
    assert bare("run", "--image", image["reference"], "--", "cat", "/etc/file").stdout == b"copied\n"
    again = bare("image", "build", "recipe.yaml", cwd=tmp_path)
    assert again.stdout.decode().strip() == image["digest"]
    assert again.stderr.count(b"(cached)") == 2


def test_the_sdk_s_images(layout, tmp_path):
    place, digest = layout
    said: list[str] = []
    assert Image.pull(f"oci:{place}", progress=lambda progress: said.append(progress.kind)).digest == digest
    assert said[-1] == "done"
    with pytest.raises(errors.InvalidInput) as caught:
        Image.build({"from": "host"})
    assert caught.value.code == "recipe_invalid"
    with pytest.raises(errors.InvalidInput):
        Image.build(tmp_path / "none.yaml")
    (tmp_path / "recipe.yaml").write_text(f"from: {digest}\nsteps:\n  - env: {{MADE: here}}\n")
    built = Image.build(tmp_path / "recipe.yaml")
    with Sandbox(image=built.digest) as box:
        assert box.exec("echo $MADE; cat /hello").stdout == "here\nhi\n"
        with pytest.raises(errors.Conflict):
            Image.remove(built.digest)
    assert {built.digest, digest} <= {image.digest for image in Image.list()}
    assert Image.get(digest).cmd == ("sh",)
    for image in (built.digest, digest):
        Image.remove(image)
    assert Image.gc() == []
