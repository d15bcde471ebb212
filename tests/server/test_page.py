"""The page's script, run by node with as much of a browser as it needs."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "server" / "web" / "page.js"
BROWSER = """
const happened = [];
let seen = null;
const element = () => ({ classList: { toggle() {} }, style: {}, addEventListener() {} });
globalThis.document = {
  hidden: false, getElementById: element, addEventListener: (name, call) => { happened.push(name); seen = call; },
};
globalThis.location = { origin: "", pathname: "/" };
globalThis.sessionStorage = { getItem: () => null };
globalThis.fetch = async () => { happened.push("fetch"); return { status: 503, json: async () => ({ error: {} }) }; };
globalThis.setTimeout = (call, time) => { happened.push(time); seen = call; };
const settled = () => new Promise(setImmediate);
(0, eval)(require("fs").readFileSync(process.argv[1], "utf8"));
(async () => {
  await settled();
  document.hidden = true;
  seen();
  await settled();
  document.hidden = false;
  seen();
  await settled();
  console.log(JSON.stringify(happened));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script with node")
def test_the_page_asks_only_while_it_is_seen() -> None:
    """In view, then in the background, then in view again."""
    run = subprocess.run(["node", "-e", BROWSER, str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(run.stdout or "null") == ["fetch", 1000, "fetch", "visibilitychange", "fetch", 1000], run.stderr
