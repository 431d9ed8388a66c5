// Before anything is drawn: the theme that was chosen, else the system's.
{
  const theme = localStorage.getItem("octavo.theme");
  if (theme) document.documentElement.dataset.theme = theme;
}
