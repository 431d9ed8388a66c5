// Before anything is drawn: the theme that was chosen, else the system's; and who comes back to a chat gets with the
// page what else would be asked for once it is drawn.
{
  const theme = localStorage.getItem("octavo.theme");
  if (theme) document.documentElement.dataset.theme = theme;
  const chat = localStorage.getItem("octavo.chat") ?? '""';
  for (const file of chat === '""' ? [] : ["render.js", "highlight.js", "vendor/marked/marked.esm.js", "vendor/dompurify/purify.es.mjs"]) {
    const link = document.createElement("link");
    link.rel = "modulepreload";
    link.href = `ui/${file}`;
    document.head.append(link);
  }
}
