"use strict";

// A chart's cursor: the mouse or the arrow keys move it; the line below shows the values there.
for (const chart of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(chart.querySelector("script").textContent);
  const plot = chart.querySelector(".plot");
  const cursor = chart.querySelector(".cursor");
  const readout = chart.querySelector(".readout");
  const [low, high] = data.x;
  let share = 1;

  const nearest = (points, x) =>
    points.reduce((best, each) => (Math.abs(each[0] - x) < Math.abs(best[0] - x) ? each : best));
  const words = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

  const show = (at) => {
    share = Math.min(1, Math.max(0, at));
    const x = low + share * (high - low);
    cursor.setAttribute("x1", 1000 * share);
    cursor.setAttribute("x2", 1000 * share);
    chart.classList.add("active");
    const found = data.series.map((each) => {
      const name = data.series.length > 1 ? each.name + " " : "";
      return name + words(nearest(each.points, x)[1]);
    });
    readout.textContent = `${data.x_name} ${words(x)}: ${found.join(" · ")}`;
  };
  const hide = () => {
    chart.classList.remove("active");
    readout.textContent = "\u00a0";
  };

  plot.addEventListener("pointermove", (event) => {
    const place = plot.getBoundingClientRect();
    show((event.clientX - place.left) / place.width);
  });
  plot.addEventListener("pointerleave", hide);
  chart.addEventListener("blur", hide);
  chart.addEventListener("focus", () => chart.matches(":focus-visible") && show(share));
  chart.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: share - 0.02, ArrowRight: share + 0.02, Home: 0, End: 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}

// The plan's strip: one tab stop; arrow keys move between tensors and modules.
for (const strips of document.querySelectorAll(".strips")) {
  const rows = [...strips.querySelectorAll(".cells")].map((row) => [...row.children]);
  const detail = strips.parentElement.querySelector(".detail");

  const show = (cell) => {
    const part = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
    const lines = [part("p", ""), part("p", cell.dataset.sizes), part("p", cell.dataset.reason)];
    lines[0].append(part("b", cell.dataset.site), " – " + cell.dataset.treatment);
    detail.replaceChildren(...lines);
  };
  const go = (cell) => {
    strips.querySelector("[tabindex='0']").tabIndex = -1;
    cell.tabIndex = 0;
    cell.focus();
  };
  const placeOf = (cell) => {
    const row = rows.findIndex((each) => each.includes(cell));
    return [row, rows[row].indexOf(cell)];
  };
  const neighbour = (cell, key) => {
    const [row, column] = placeOf(cell);
    const all = rows.flat();
    const index = all.indexOf(cell);
    const vertical = (next) => next && next[Math.min(column, next.length - 1)];
    if (key === "ArrowLeft") return all[index - 1];
    if (key === "ArrowRight") return all[index + 1];
    if (key === "ArrowUp") return vertical(rows[row - 1]);
    if (key === "ArrowDown") return vertical(rows[row + 1]);
    if (key === "Home") return all[0];
    if (key === "End") return all[all.length - 1];
    return undefined;
  };

  strips.addEventListener("pointerover", (event) => {
    if (event.target.matches(".cell")) show(event.target);
  });
  strips.addEventListener("focusin", (event) => {
    if (event.target.matches(".cell")) show(event.target);
  });
  strips.addEventListener("click", (event) => {
    if (event.target.matches(".cell")) go(event.target);
  });
  strips.addEventListener("keydown", (event) => {
    const keys = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"];
    if (!event.target.matches(".cell") || !keys.includes(event.key)) return;
    event.preventDefault();
    const next = neighbour(event.target, event.key);
    if (next) go(next);
  });
}
