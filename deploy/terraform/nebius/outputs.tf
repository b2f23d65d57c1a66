output "cluster_id" {
  description = "ID of the Kubernetes cluster, for: nebius mk8s cluster get-credentials --external --id ID"
  value       = nebius_mk8s_v1_cluster.cluster.id
}

output "gpu_node_group_id" {
  description = "ID of the group of GPU nodes, for: nebius mk8s node-group get --id ID"
  value       = nebius_mk8s_v1_node_group.gpu.id
}

output "trial_arguments" {
  description = "Arguments of seatrial run for this cluster"
  value       = ["--nodes", tostring(var.gpu_node_count), "--gpus-per-node", "8"]
}

output "shared_folder" {
  description = "Folder of the shared filesystem on all GPU nodes, for run directories and caches"
  value       = local.shared_folder
}

output "infiniband_topology" {
  description = "Switches between the nodes, by instance"
  value       = nebius_compute_v1_gpu_cluster.infiniband.status.infiniband_topology_path
}
