// Reads values off the plots: the nearest point of every track under the pointer, or by the arrow keys.
// The numbers are in the data block that data-values names: [{columns, rows: [[x, y, colour, ...texts]]}],
// x and y as shares of the plot. Without this file the page is the same, less the crosshair.
"use strict";

for (const plot of document.querySelectorAll("[data-values]")) {
  const tracks = JSON.parse(document.getElementById(plot.dataset.values).textContent)
    .filter((track) => track.rows.length > 0);
  if (tracks.length > 0) attach(plot, tracks);
}

function attach(plot, tracks) {
  const height = () => plot.querySelector("svg").getBoundingClientRect().height;
  const cursor = add(plot, "div", "cursor");
  const marks = tracks.map(() => add(plot, "i", "spot"));
  const tip = add(plot, "div", "tip");
  let at = tracks[0].rows.length - 1; // where the arrow keys are

  function show(x) {
    tip.replaceChildren();
    tracks.forEach((track, number) => {
      const row = track.rows[nearest(track.rows, x)];
      const [left, top, colour, ...texts] = row;
      if (number === 0) cursor.style.left = `${100 * left}%`;
      marks[number].className = `spot ${colour}`;
      marks[number].style.left = `${100 * left}%`;
      marks[number].style.top = `${top * height()}px`;
      marks[number].hidden = top === null || top < 0 || top > 1;
      const list = add(tip, "dl", colour);
      track.columns.forEach((name, column) => {
        add(list, "dt").textContent = name;
        add(list, "dd").textContent = texts[column];
      });
    });
    tip.style.left = x < 0.5 ? `calc(${100 * x}% + 14px)` : "auto";
    tip.style.right = x < 0.5 ? "auto" : `calc(${100 * (1 - x)}% + 14px)`;
    plot.classList.add("read");
  }

  const hide = () => plot.classList.remove("read");
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const x = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    at = nearest(tracks[0].rows, x);
    show(x);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (move === undefined) return;
    event.preventDefault();
    at = Math.min(tracks[0].rows.length - 1, Math.max(0, at + move));
    show(tracks[0].rows[at][0]);
  });
}

function add(parent, tag, name = "") {
  const element = parent.appendChild(document.createElement(tag));
  element.className = name;
  return element;
}

// Rows are in order of x.
function nearest(rows, x) {
  let low = 0, high = rows.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (rows[middle][0] <= x) low = middle; else high = middle;
  }
  return x - rows[low][0] < rows[high][0] - x ? low : high;
}
