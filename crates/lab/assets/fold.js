// What a page has folded away: a link to it unfolds it, and so does paper.
"use strict";

function unfold() {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target && target.closest("details:not([open])");
  if (folded) { folded.open = true; target.scrollIntoView(); }
}

addEventListener("hashchange", unfold);
addEventListener("beforeprint", () => document.querySelectorAll("details:not([open])").forEach(one => { one.open = true; one.dataset.printed = ""; }));
addEventListener("afterprint", () => document.querySelectorAll("details[data-printed]").forEach(one => { one.open = false; delete one.dataset.printed; }));
unfold();
