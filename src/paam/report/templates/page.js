// What moves on the page. Everything is drawn already when this runs: without it the page shows the last cycle.
(() => {
  "use strict";
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  root.classList.add("js");

  // --- light and dark ---
  const themeButton = document.getElementById("theme");
  const wantsDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : wantsDark.matches);
  const nameTheme = () => { themeButton.textContent = isDark() ? "Light" : "Dark"; };
  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  wantsDark.addEventListener("change", nameTheme);
  nameTheme();

  // --- tips: hover, focus or tap; arrow keys walk from mark to mark ---
  const tip = document.getElementById("tip");
  const hide = () => { tip.hidden = true; };
  function show(words, box) {
    tip.textContent = words;
    tip.hidden = false;
    const left = box.left + box.width / 2 - tip.offsetWidth / 2;
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${Math.max(6, Math.min(left, root.clientWidth - tip.offsetWidth - 6))}px`;
    tip.style.top = `${above > 4 ? above : box.bottom + 8}px`;
  }
  for (const group of all(".marks")) {
    const marks = all(".layer, .mark", group);
    marks.forEach((mark, place) => {
      const title = mark.querySelector("title");
      const words = title ? title.textContent : mark.title;
      title ? title.remove() : mark.removeAttribute("title");
      mark.dataset.tip = words;
      mark.setAttribute("role", "img");
      mark.setAttribute("aria-label", words);
      mark.setAttribute("tabindex", place ? "-1" : "0");
      const reveal = () => show(words, mark.getBoundingClientRect());
      mark.addEventListener("pointerenter", reveal);
      mark.addEventListener("focus", reveal);
      mark.addEventListener("click", reveal);
      mark.addEventListener("pointerleave", hide);
      mark.addEventListener("blur", hide);
      mark.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        const next = step && marks[place + step];
        if (!next) return;
        event.preventDefault();
        mark.setAttribute("tabindex", "-1");
        next.setAttribute("tabindex", "0");
        next.focus();
      });
    });
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  addEventListener("scroll", hide, { passive: true });

  // --- layer by layer: heights by filters or by share ---
  for (const figure of all(".budget")) {
    const panels = figure.querySelector(".panels");
    const height = +panels.dataset.height;
    for (const button of all("[data-heights]", figure)) {
      button.addEventListener("click", () => {
        for (const other of all("[data-heights]", figure)) other.setAttribute("aria-pressed", other === button);
        for (const layer of all(".layer", panels)) {
          const { kept, width } = layer.dataset;
          const unit = height / (button.dataset.heights === "share" ? width : panels.dataset.widest);
          const base = height + 30;
          for (const [part, count] of [["full", width], ["kept", kept]]) {
            const bar = layer.querySelector(`.${part}`);
            bar.setAttribute("height", count * unit);
            bar.setAttribute("y", base - count * unit);
          }
          layer.querySelector(".count").setAttribute("y", base - width * unit - 4);
        }
      });
    }
  }

  // --- scores: another cycle, another layer ---
  for (const figure of all(".scores")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const slider = figure.querySelector(".cycle");
    const choice = figure.querySelector(".layer-choice");
    const [bars, curve] = all(".area", figure);
    const find = (selector) => figure.querySelector(selector);

    function draw() {
      const cycle = data.cycles[+slider.value];
      const layer = +choice.value;
      const mine = (list) => (layer < 0 ? list : [list[layer]]);
      const counts = Array(data.bins).fill(0);
      for (const sparse of mine(cycle.counts)) for (let i = 0; i < sparse.length; i += 2) counts[sparse[i]] += sparse[i + 1];
      const total = counts.reduce((sum, count) => sum + count, 0);
      const most = Math.max(...counts, 1) * 1.06;
      const theta = cycle.threshold;
      const split = theta === null ? 0 : Math.max(0, Math.min(100, (100 * (theta - data.start)) / (data.bins * data.bin)));
      const bar = (left, right, top) => (right - left > 0.01 ? `M${left} 100V${top}H${right}V100Z` : "");
      let cut = "", stay = "", steps = "M0 100", sum = 0;
      counts.forEach((count, place) => {
        const [left, right] = [(100 * place) / data.bins, (100 * (place + 1)) / data.bins];
        const top = 100 - (100 * count) / most;
        sum += count;
        steps += `L${right} ${100 - (100 * sum) / (total || 1)}`;
        if (!count) return;
        cut += bar(left, Math.min(right, split), top);
        stay += bar(Math.max(left, split), right, top);
      });
      bars.querySelector(".cut").setAttribute("d", cut);
      bars.querySelector(".stay").setAttribute("d", stay);
      curve.querySelector("path").setAttribute("d", steps);
      ticks(bars.querySelector(".y-ticks"), most);
      for (const area of [bars, curve]) mark(area, cycle.shown, split);
      const kept = mine(cycle.kept).filter((pair) => pair.length);
      const count = (index) => kept.reduce((all, pair) => all + pair[index], 0).toLocaleString("en");
      find(".cycle-number").textContent = cycle.cycle;
      find(".which").textContent = `Cycle ${cycle.cycle}, ${layer < 0 ? "all layers" : data.layers[layer]}.`;
      find(".what").textContent = kept.length
        ? `${count(0)} of ${count(1)} filters stay${theta === null ? "" : `; threshold θ = ${cycle.shown}`}`
        : "The selection of this cycle is not recorded.";
    }

    function ticks(holder, most) {
      const raw = Math.max(most / 4, 1);
      const power = 10 ** Math.floor(Math.log10(raw));
      const step = [1, 2, 5, 10].map((k) => k * power)
        .reduce((best, size) => (Math.abs(Math.log(size / raw)) < Math.abs(Math.log(best / raw)) ? size : best));
      holder.replaceChildren();
      for (let value = 0; value <= most; value += step) {
        const label = document.createElement("span");
        label.append(document.createElement("b"));
        label.firstChild.textContent = value.toLocaleString("en");
        label.style.bottom = `${(100 * value) / most}%`;
        holder.append(label);
      }
    }

    function mark(area, shown, split) {
      let rule = area.querySelector(".rule");
      if (!rule) {
        rule = document.createElement("i");
        rule.className = "rule";
        rule.append(document.createElement("span"));
        area.append(rule);
      }
      rule.hidden = shown === null;
      if (shown === null) return;
      rule.style.left = `${split}%`;
      rule.firstChild.textContent = `θ = ${shown}`;
      rule.firstChild.className = split > 70 ? "before" : "";
    }

    slider.addEventListener("input", draw);
    choice.addEventListener("change", draw);
  }

  // --- curves: a cursor that tells the numbers of an epoch ---
  for (const figure of all(".curves")) {
    const epochs = JSON.parse(figure.querySelector("script").textContent);
    const areas = all(".area", figure);
    const cursors = areas.map((area) => area.appendChild(Object.assign(document.createElement("i"), { className: "cursor", hidden: true })));
    const first = epochs[0][0] - 0.5;
    const span = Math.max(epochs.at(-1)[0], epochs[0][0] + 1) + 0.5 - first;
    let place = epochs.length - 1;

    function tell(index) {
      place = Math.max(0, Math.min(epochs.length - 1, index));
      const [number, phase, cycle, loss, accuracy, kept] = epochs[place];
      for (const cursor of cursors) {
        cursor.hidden = false;
        cursor.style.left = `${(100 * (number - first)) / span}%`;
      }
      const lines = [`epoch ${number}, ${phase}${cycle ? ` of cycle ${cycle}` : ""}`];
      lines.push(loss === null ? "loss not recorded" : `loss ${loss.toFixed(4)}`);
      if (accuracy !== null) lines.push(`accuracy ${accuracy.toFixed(2)} %`);
      if (kept !== null && kept < 1) lines.push(`${(100 * kept).toFixed(1)} % of MACs`);
      show(lines.join("\n"), cursors[0].getBoundingClientRect());
    }
    function leave() {
      for (const cursor of cursors) cursor.hidden = true;
      hide();
    }
    for (const area of areas) {
      const follow = (event) => {
        const box = area.getBoundingClientRect();
        const wanted = first + (span * (event.clientX - box.left)) / box.width;
        let nearest = 0;
        epochs.forEach((epoch, index) => {
          if (Math.abs(epoch[0] - wanted) < Math.abs(epochs[nearest][0] - wanted)) nearest = index;
        });
        tell(nearest);
      };
      for (const kind of ["pointermove", "pointerdown", "click"]) area.addEventListener(kind, follow);
      // A finger that was lifted leaves its numbers on the page; the next touch elsewhere takes them away.
      area.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
      addEventListener("pointerdown", (event) => { if (!figure.contains(event.target)) leave(); });
    }
    figure.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || event.target !== figure) return;
      event.preventDefault();
      tell(place + step);
    });
    figure.addEventListener("blur", leave);
  }

  // --- sorting: the header's button, by mouse or keyboard; what has no value stays last ---
  for (const table of all(".sortable")) {
    all("thead th", table).forEach((header, column) => {
      header.querySelector("button").addEventListener("click", () => {
        const down = header.getAttribute("aria-sort") === "ascending";
        for (const other of all("thead th", table)) other.removeAttribute("aria-sort");
        header.setAttribute("aria-sort", down ? "descending" : "ascending");
        const value = (row) => row.children[column].dataset.value;
        const rows = all("tbody tr", table).sort((a, b) => {
          const [one, two] = [value(a), value(b)];
          if (one === "" || two === "") return (one === "") - (two === "");
          return (down ? -1 : 1) * (one - two);
        });
        table.tBodies[0].append(...rows);
      });
    });
  }

  // --- a run opens when a link leads to it; all are open on paper ---
  function openTarget() {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target && target.tagName === "DETAILS") {
      target.open = true;
      target.scrollIntoView();
    }
  }
  addEventListener("hashchange", openTarget);
  openTarget();
  const closed = () => all("details.run:not([open])");
  let opened = [];
  addEventListener("beforeprint", () => { opened = closed(); for (const run of opened) run.open = true; });
  addEventListener("afterprint", () => { for (const run of opened) run.open = false; });

  // --- copying the command ---
  for (const button of all(".copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
})();
