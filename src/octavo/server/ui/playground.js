export class Playground { element = document.createElement("div"); bar = document.createElement("div"); }
