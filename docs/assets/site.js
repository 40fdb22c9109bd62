// Tables that are wider than the page scroll, in boxes that the theme puts around them: the keyboard must reach these.
"use strict";
addEventListener("load", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) box.tabIndex = 0;
});
