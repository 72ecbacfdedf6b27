"""The browser of samples on a run's page. Without it the samples are a list that opens by hand.

It shows and hides what is in the page and makes no markup of any text. The page's policy allows
this script by its hash, and no other.
"""

import base64
import hashlib

SCRIPT = """
"use strict";
(() => {
  const bar = document.getElementById("browser");
  if (!bar) return;
  const all = [...document.querySelectorAll("details.sample")];
  const [set, status] = ["browse-set", "browse-status"].map((id) => document.getElementById(id));
  const place = document.getElementById("browse-place");
  let shown = all, at = 0;
  const show = () => {
    for (const one of all) { one.hidden = one !== shown[at]; one.open = one === shown[at]; }
    place.textContent = shown.length ? `${at + 1} of ${shown.length}` : "none of these";
  };
  const move = (by) => {
    if (!shown.length) return;
    at = (at + by + shown.length) % shown.length;
    show();
  };
  const choose = () => {
    const fits = (select, value) => !select.value || select.value === value;
    shown = all.filter((one) => fits(set, one.dataset.set) && fits(status, one.dataset.status));
    at = 0;
    show();
  };
  set.addEventListener("change", choose);
  status.addEventListener("change", choose);
  document.getElementById("browse-previous").addEventListener("click", () => move(-1));
  document.getElementById("browse-next").addEventListener("click", () => move(1));
  document.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const held = event.altKey || event.ctrlKey || event.metaKey || event.shiftKey;
    if (by && !held && event.target.tagName !== "SELECT" && !event.target.closest(".wide")) {
      event.preventDefault();
      move(by);
    }
  });
  let start = null;
  const samples = document.getElementById("samples");
  samples.addEventListener("touchstart", (event) => {
    start = event.touches.length === 1 ? event.touches[0] : null;
  }, { passive: true });
  samples.addEventListener("touchend", (event) => {
    if (!start) return;
    const end = event.changedTouches[0];
    const across = end.clientX - start.clientX, down = end.clientY - start.clientY;
    if (Math.abs(across) > 60 && Math.abs(across) > 2 * Math.abs(down)) move(across < 0 ? 1 : -1);
    start = null;
  }, { passive: true });
  bar.hidden = false;
  choose();
})();
"""
SCRIPT_HASH = "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
