// What the theme leaves out for the keyboard and for screen readers: boxes around tables that are wider than the page scroll,
// and the search is a dialog, which needs a name.
"use strict";
addEventListener("load", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) box.tabIndex = 0;
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
});
