// Charts from the curves that the page names, and the clock that refreshes what is live while the page is visible.
"use strict";
(() => {
  const REFRESH_MS = 3000, HEIGHT = 200, COLORS = 8, DASHES = [undefined, [8, 4], [3, 3], [12, 4, 3, 4]];
  const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = index => style(`--c${index % COLORS + 1}`);
  const shown = value => value == null ? "" : Number(value.toPrecision(5)).toString();
  const tick = value => value && Math.abs(value) < 0.001 ? value.toExponential(1) : Number(value.toPrecision(6)).toLocaleString("en");
  const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 1000000];

  // Columns of uPlot: the steps, then each line, with the edges of its band after it.
  const columns = chart => [chart.steps, ...chart.lines.flatMap(line => line.low ? [line.values, line.high, line.low] : [line.values])];
  const shape = charts => JSON.stringify(charts.map(chart => [chart.section, chart.title, chart.lines.map(line => [line.label, !!line.low])]));

  function options(chart, width) {
    const series = [{ label: chart.is_time ? "time" : "step" }], bands = [];
    chart.lines.forEach((line, index) => {
      const stroke = color(line.color ?? index), dash = line.is_constant ? [2, 4] : DASHES[(line.dashes ?? 0) % DASHES.length];
      const points = { show: !line.is_constant && (chart.points || chart.steps.length === 1), size: 6 };
      series.push({ label: line.label, stroke, dash, width: 2, spanGaps: chart.points, points, value: (_, value) => shown(value) });
      if (line.low) {
        const edge = { stroke: "transparent", class: "band", points: { show: false }, spanGaps: chart.points };
        series.push({ ...edge, label: `${line.label}, largest` }, { ...edge, label: `${line.label}, smallest` });
        bands.push({ series: [series.length - 2, series.length - 1], fill: `color-mix(in srgb, ${stroke} 20%, transparent)` });
      }
    });
    const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 }, font: "11px system-ui" };
    const [low, high] = chart.limits;
    const range = (_, smallest, largest) => {
      const least = low == null ? smallest : Math.min(low, smallest), most = high == null ? largest : Math.max(high, largest);
      const room = (most - least) * 0.05 || Math.abs(most) * 0.1 || 1;
      return [low != null && smallest >= low ? low : least - room, most + room];
    };
    return {
      width, height: HEIGHT, series, bands,
      cursor: { sync: { key: chart.is_time ? "time" : "step" }, points: { size: 6 } },
      scales: { x: { time: !!chart.is_time }, y: { range } },
      axes: [chart.is_time ? axis : { ...axis, incrs: STEPS }, { ...axis, size: 56, values: (_, ticks) => ticks.map(tick) }],
    };
  }

  class Charts {
    constructor(root) { this.root = root; this.plots = []; this.tag = ""; this.shape = ""; this.charts = []; }

    async refresh() {
      const response = await fetch(this.root.dataset.src, { headers: this.tag ? { "if-none-match": this.tag } : {} });
      if (response.status === 401) return location.reload();
      if (response.status !== 200) return;
      this.tag = response.headers.get("etag") || "";
      this.charts = (await response.json()).charts;
      if (shape(this.charts) === this.shape) this.update(); else this.draw();
    }

    update() {
      this.charts.forEach((chart, index) => {
        const plot = this.plots[index], old = plot.data[0], { min, max } = plot.scales.x;
        const isZoomed = old.length > 1 && (min > old[0] || max < old[old.length - 1]);
        plot.setData(columns(chart), !isZoomed);
        if (isZoomed) plot.redraw();
      });
    }

    draw() {
      this.plots.forEach(plot => plot.destroy());
      this.plots = [];
      this.shape = shape(this.charts);
      this.root.replaceChildren();
      let section = null, grid = null;
      for (const chart of this.charts) {
        if (chart.section !== section) {
          section = chart.section;
          const heading = document.createElement("h2");
          heading.textContent = section;
          grid = document.createElement("div");
          grid.className = "charts";
          this.root.append(heading, grid);
        }
        const figure = document.createElement("figure"), title = document.createElement("h3"), place = document.createElement("div");
        figure.className = "chart";
        title.textContent = chart.title;
        place.className = "plot";
        figure.append(title, place);
        grid.append(figure);
        figure.place = place;
      }
      this.charts.forEach((chart, index) => {
        const place = this.root.querySelectorAll(".plot")[index];
        const plot = new uPlot(options(chart, place.clientWidth), columns(chart), place);
        new ResizeObserver(() => place.clientWidth && plot.setSize({ width: place.clientWidth, height: HEIGHT })).observe(place);
        this.plots.push(plot);
      });
      this.root.dataset.drawn = this.charts.length;
    }
  }

  let sets = [];
  const refresh = () => sets.forEach(set => set.refresh().catch(() => {}));
  document.addEventListener("DOMContentLoaded", () => {
    sets = [...document.querySelectorAll("[data-src]")].map(root => new Charts(root));
    refresh();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => sets.forEach(set => set.draw()));
    setInterval(() => {
      if (document.visibilityState !== "visible") return;
      refresh();
      document.body.dispatchEvent(new Event("refresh"));
    }, REFRESH_MS);
  });
})();
