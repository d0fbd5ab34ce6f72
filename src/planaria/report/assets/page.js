// What a page does in the browser: unpacks and draws its figures, light or dark, and saves them as files.
"use strict";
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const KEY = "planaria-theme";
  const NARROW = 640; // pixels

  // Pages that are opened as files may have no storage.
  const remembered = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
  const remember = (theme) => { try { localStorage.setItem(KEY, theme); } catch { /* for this visit only */ } };
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  if (remembered()) root.dataset.theme = remembered();

  async function unpack(id) {
    const bytes = Uint8Array.from(atob(document.getElementById(`packed-${id}`).textContent.trim()), (c) => c.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  function save(name, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  // Figures are made in the light theme; the dark one is the same with other colours.
  function recoloured(value, colours) {
    if (typeof value === "string") {
      return value.replace(/#[0-9a-f]{6}\b|rgba\([\d., ]+\)/gi, (colour) => colours[colour.toLowerCase()] ?? colour);
    }
    if (Array.isArray(value)) { // a colour scale has numbers and colours
      return value.every((one) => typeof one === "number") ? value : value.map((one) => recoloured(one, colours));
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, recoloured(one, colours)]));
    }
    return value;
  }

  const lettered = (word) => ({
    svg: '<svg viewBox="0 0 34 16" style="width:30px"><text x="17" y="12.5" text-anchor="middle" font-size="12"' +
      ` font-weight="600" class="icon" font-family="system-ui, sans-serif">${word}</text></svg>`,
  });

  function modeBar(figures) {
    const image = (format) => (plot) => Plotly.downloadImage(plot, {
      format, filename: `${figures.page}-${plot.id}`, scale: format === "png" ? 2 : 1,
      width: plot.clientWidth, height: plot.clientHeight,
    });
    const csv = (plot) => save(`${figures.page}-${plot.id}.csv`, figures.sheets[plot.id]);
    const button = (name, title, click) => ({ name, title, icon: lettered(name), click });
    return [
      [button("PNG", "Save as PNG", image("png")), button("SVG", "Save as SVG", image("svg")),
        button("CSV", "Save the numbers as CSV", csv)],
      ["zoom2d", "pan2d", "resetScale2d"],
    ];
  }

  function draw(figures) {
    const config = { displayModeBar: true, displaylogo: false, responsive: true, modeBarButtons: modeBar(figures) };
    for (const [name, { data, layout }] of Object.entries(figures.drawn)) {
      const colours = dark() ? figures.dark : {};
      const shown = { ...recoloured(layout, colours), modebar: figures.bar[dark() ? 1 : 0] };
      if (innerWidth < NARROW) { // legends have two columns there instead of a line
        shown.margin = { ...shown.margin, l: 4, r: 8 };
        shown.height += 11 * data.filter((trace) => trace.name && trace.showlegend !== false).length;
      }
      Plotly.react(document.getElementById(name), recoloured(data, colours), shown, config);
    }
  }

  function excuse(error) {
    for (const place of document.querySelectorAll(".figure")) {
      place.textContent = `No figures: they need a browser of 2023 or later (${error}). The tables are complete.`;
      place.style.minHeight = "0";
    }
  }

  async function begin() {
    const figures = JSON.parse(await unpack("figures"));
    for (const button of document.querySelectorAll("button[data-sheet]")) {
      const name = button.dataset.sheet;
      button.addEventListener("click", () => save(`${figures.page}-${name}.csv`, figures.sheets[name]));
    }
    const again = () => draw(figures);
    document.getElementById("theme").addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      remember(root.dataset.theme);
      again();
    });
    system.addEventListener("change", again);
    if (Object.keys(figures.drawn).length) {
      const script = document.createElement("script");
      script.textContent = await unpack("plotly");
      document.head.append(script);
      again();
    }
    root.dataset.drawn = "yes";
  }

  addEventListener("DOMContentLoaded", () => begin().catch(excuse));
})();
