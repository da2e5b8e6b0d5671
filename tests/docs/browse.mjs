// Every page of the site in a headless browser: no error on its console, nothing asked of anybody else, every link and
// picture there, the search finds, and the dark palette turns on. Ends with status 1 and the list where that is not so.
//
//     node tests/docs/browse.mjs MODULES SITE PICTURE.png
//
// MODULES is the folder in which `npm install puppeteer-core @sparticuz/chromium` was run, SITE what `make docs` built.

import { createRequire } from "node:module";
import { createServer } from "node:http";
import { readFile, readdir } from "node:fs/promises";
import { extname, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, site, picture] = process.argv.slice(2).map((path) => resolve(path));
const { resolve: found } = createRequire(join(modules, "package.json"));
const load = async (name) => (await import(pathToFileURL(found(name)))).default;
const TYPES = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml",
  ".png": "image/png", ".json": "application/json" };

const server = createServer(async (request, response) => {
  const path = decodeURIComponent(new URL(request.url, "http://site").pathname);
  try {
    const body = await readFile(join(site, path.endsWith("/") ? `${path}index.html` : path));
    response.writeHead(200, { "content-type": TYPES[extname(path)] ?? "application/octet-stream" }).end(body);
  } catch {
    response.writeHead(404).end();
  }
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const home = `http://127.0.0.1:${server.address().port}/`;

const chromium = await load("@sparticuz/chromium");
const puppeteer = await load("puppeteer-core");
const executablePath = await chromium.executablePath();
const browser = await puppeteer.launch({ args: chromium.args, executablePath, headless: "shell" });
const page = await browser.newPage();
page.setDefaultTimeout(180_000); // on a machine that is busy
await page.setViewport({ width: 1280, height: 900 });

const faults = [];
let here = "";
page.on("console", (said) => said.type() === "error" && faults.push(`${here}: console: ${said.text()}`));
page.on("pageerror", (error) => faults.push(`${here}: ${error.message}`));
page.on("response", (one) => one.status() >= 400 && faults.push(`${here}: ${one.status()} ${one.url()}`));
page.on("request", (one) => {
  if (!one.url().startsWith(home) && !one.url().startsWith("data:")) faults.push(`${here}: asks ${one.url()}`);
});

const pages = (await readdir(site)).filter((name) => name.endsWith(".html") && name !== "404.html");
const names = new Map();
const links = [];
let pictures = 0;
for (const name of pages) {
  here = name;
  await page.goto(home + name, { waitUntil: "networkidle0" });
  const seen = await page.evaluate(() => ({
    ids: [...document.querySelectorAll("[id]")].map((one) => one.id),
    links: [...document.querySelectorAll("a[href]")].map((one) => one.href),
    pictures: [...document.images].map((one) => [one.src, one.complete && one.naturalWidth > 0]),
    wide: document.documentElement.scrollWidth > document.documentElement.clientWidth,
  }));
  names.set(name, new Set(seen.ids));
  links.push(...seen.links.map((link) => [name, link]));
  pictures += seen.pictures.length;
  for (const [source, shown] of seen.pictures) if (!shown) faults.push(`${name}: ${source} is not shown`);
  if (seen.wide) faults.push(`${name}: is wider than the window`);
}
for (const [name, link] of links) {
  if (!link.startsWith(home)) continue;
  const url = new URL(link);
  const target = url.pathname.slice(1) || "index.html";
  const anchor = decodeURIComponent(url.hash.slice(1));
  if (names.has(target) ? anchor && !names.get(target).has(anchor) : (await fetch(link)).status !== 200)
    faults.push(`${name}: ${link} leads nowhere`);
}

here = "the start page";
await page.goto(home + "index.html", { waitUntil: "networkidle0" });
await page.screenshot({ path: picture });
const QUESTIONS = { preflight: "preflight.html", "learning rate": "", nanotron: "nanotron.html", Slurm: "slurm.html" };
for (const [words, wanted] of Object.entries(QUESTIONS)) {
  await page.goto(home + "index.html", { waitUntil: "networkidle0" });
  await page.click("input.md-search__input");
  await page.type("input.md-search__input", words);
  const hits = ".md-search-result__link";
  const leads = (all, page) => [...document.querySelectorAll(all)].some((one) => one.href.includes(page));
  // words that are half typed have results, too
  const found = page.waitForFunction(leads, { timeout: 10000 }, hits, wanted);
  await found.catch(() => faults.push(`search: ${words} does not lead to ${wanted || "any page"}`));
}
await page.goto(home + "index.html", { waitUntil: "networkidle0" });
await page.evaluate(() => document.querySelector("label.md-header__button[for^=__palette]").click());
const scheme = await page.evaluate(() => document.body.getAttribute("data-md-color-scheme"));
if (scheme !== "slate") faults.push(`dark: the palette is ${scheme}`);

await browser.close();
server.close();
const told = { pages: pages.length, links: links.length, pictures, searches: Object.keys(QUESTIONS).length };
console.log(JSON.stringify({ ...told, faults: [...new Set(faults)] }, null, 1));
process.exit(faults.length ? 1 : 0);
