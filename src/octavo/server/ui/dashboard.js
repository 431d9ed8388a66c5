export class Dashboard { element = document.createElement("div"); bar = document.createElement("div"); }
